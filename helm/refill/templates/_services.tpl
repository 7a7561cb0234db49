{{/* What the Services have beside their ports, where it was asked for; what Kubernetes would refuse is refused here. */}}

{{- define "refill.serviceFields" -}}
{{- $service := .Values.service -}}
{{- $isBalanced := eq $service.type "LoadBalancer" -}}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if and (get $service $name) (not $isBalanced) -}}
{{- fail (printf "service.%s needs service.type=LoadBalancer" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $service.externalTrafficPolicy (eq $service.type "ClusterIP") -}}
{{- fail "service.externalTrafficPolicy needs service.type=LoadBalancer or NodePort" -}}
{{- end -}}
{{- with $service.externalTrafficPolicy }}
externalTrafficPolicy: {{ . }}
{{- end }}
{{- if and $service.loadBalancerClass (include "refill.since" (list . "1.21")) }}
loadBalancerClass: {{ $service.loadBalancerClass }}
{{- end }}
{{- with $service.loadBalancerSourceRanges }}
loadBalancerSourceRanges:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "refill.ipFamilies" . }}
{{- end }}

{{/* Of both Services: pods are to be reached by the same families. */}}
{{- define "refill.ipFamilies" -}}
{{- if and (has "IPv6" (.Values.service.ipFamilies | default list)) (not (contains ":" .Values.settings.host)) -}}
{{- fail (printf "settings.host, %s, is of IPv4 alone, and service.ipFamilies has IPv6: set settings.host to \"::\", which listens for both" .Values.settings.host) -}}
{{- end -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
